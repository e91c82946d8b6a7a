"""OpenAI's ``/v1/responses``, without state: a chat in another form."""
