from jaxtap_testkit.strict import strict_dtypes  # noqa: F401
