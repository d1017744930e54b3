"""The embedded video model's own world: drawn clips with captions, training on them, and a scorer with ground truth."""
