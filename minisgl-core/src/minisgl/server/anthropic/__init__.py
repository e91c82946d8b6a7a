"""Anthropic's ``/v1/messages``: a chat in another form."""
