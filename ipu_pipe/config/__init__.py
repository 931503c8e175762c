"""A run's config: YAML or Python keys in, one checked and frozen `Config` out. No torch.

values          the types of values, with their limits
sections        the sections that depend on no other
backend_facts   what each backend supports
schema          all keys, and the rules between keys of different sections: `Config`
load            reads YAML, overrides and Python keys: `load_config`, `configure`, `resolve_method`
faults          formats all faults, one line each
compare         the keys that decide a run's numbers, and the differences of two configs
"""
