"""The operators inside somebody else's job: a linear-logp provider for vime, a patch for Hugging Face models.

Each module is imported by name where it is wanted; nothing here imports an engine before it is used.
"""
