"""Moving tensors between the ranks of a group, in rank order; merging them is left to the operators' merge functions.

Nothing here adds, so nothing here can add in the order of arrival.
"""
