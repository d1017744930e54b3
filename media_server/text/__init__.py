"""Text: templates, the way to an engine and back, storyboards; no model code."""
