"""One module or package per engine or framework; each imports its framework only when handed its objects."""
