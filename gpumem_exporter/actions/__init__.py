"""Actions: asked, delivered, answered, measured."""
