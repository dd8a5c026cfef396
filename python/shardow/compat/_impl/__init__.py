"""Keeps averages for the compat classes, none of which it imports. `parameter_list`: averages beside a list of tensors;
`averaged_copy`: in a second model; `swapped_model_proxy`: in an EMA that looks like a second model, for FSDP models,
which cannot be copied; its `follow()` chooses between these two. Below them `given_memory`: averages in memory that
others own. `files` writes as upstreams do."""
