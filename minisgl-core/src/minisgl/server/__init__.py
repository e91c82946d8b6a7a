"""The OpenAI-compatible server: HTTP in this process, everything else in its workers.

``minisgl.server.supervisor.serve`` runs one. This process imports neither torch nor transformers.
"""
