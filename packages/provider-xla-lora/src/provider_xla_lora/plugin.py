"""What provider-xla-lora declares to jaxtap. Must not import jax."""

from interception_core import FeatureSpec, hookimpl

API = (1, 7)


@hookimpl
def jaxtap_register_features() -> list[FeatureSpec]:
    """Return what plans do with adapters of any kind, and LoRA's rule and form."""
    return [
        FeatureSpec(name, summary, f"provider_xla_lora.{run}")
        for name, summary, run in (
            ("plan-find-adapters", "find the parameters that get adapters", "find:Finder"),
            ("plan-init-adapters", "make adapters", "use:init_adapters"),
            ("plan-put-adapters", "put adapters at their parameters", "use:put_adapters"),
            ("plan-apply-adapters", "run a plan's function with adapters", "use:apply_adapters"),
            ("run-adapters", "run functions with adapters, without a plan", "use:run_adapters"),
            ("rule-lora", "a rule that gives adapters of a rank", "rule:LoraRule"),
            ("adapter-lora", "two factors, whose product is added", "rule:LoraForm"),
        )
    ]
