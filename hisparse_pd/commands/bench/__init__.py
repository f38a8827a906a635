"""``hisparse-pd bench serve``: load on any OpenAI-compatible endpoint."""
