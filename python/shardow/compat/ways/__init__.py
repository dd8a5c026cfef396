"""The ways to keep averages: beside tensors, in a second model, in a list, behind a stand-in. They import `files`, no surface."""
