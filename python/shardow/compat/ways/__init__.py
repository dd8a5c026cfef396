"""The ways to keep averages, none of which imports a surface. `listed`: beside a list of tensors; `twin`: in a second
model; `stand_in`: in an EMA that looks like one, where FSDP's cannot be copied; `averaged` takes one of these two.
Below them `pairs`, tensors side by side.
"""
