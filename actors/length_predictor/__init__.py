"""Predicts which prompts will have long answers: rankers, their fusion, and a Ray Serve deployment around them."""
