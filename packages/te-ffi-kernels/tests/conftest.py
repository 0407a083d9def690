from jaxtap_testkit.strict import strict_dtypes, strict_ranks  # noqa: F401
