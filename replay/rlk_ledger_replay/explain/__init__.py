"""Explain: imitate one side with variants of the reference and say which one its values follow, if any.

Imports nothing, so that commands stay quick to start; `explain.run.explain` is the door.
"""
