"""Records what vLLM did: samples, log-probabilities, settings in force, weights held."""
