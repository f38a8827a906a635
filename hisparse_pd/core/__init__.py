"""What both engines compute with: the model, its pages, a machine's memory, grammars."""
