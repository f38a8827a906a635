"""SGLang's whole engine beside ours on one GPU, by turns; ``README.md`` says how."""
