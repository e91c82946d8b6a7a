"""``minisgl bench serve``: a load generator for any OpenAI-compatible server, and its figures."""
