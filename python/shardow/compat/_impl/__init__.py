"""Ways to keep averages, none of which imports a compat class. `parameter_list`: beside a list of tensors;
`averaged_copy`: in a second model; `swapped_model_proxy`: in an EMA that looks like one, where FSDP's cannot be copied;
`averaged` takes one of the last two. Below them `given_memory`, averages in memory that others own. `files`: what the
upstream projects write.
"""
