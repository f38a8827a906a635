"""The parts with which both engines compute: the model, its pages, a machine's memory, grammars."""
