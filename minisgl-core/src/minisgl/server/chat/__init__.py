"""What all chat protocols share: how a chat is asked of the engine, and how its text is read."""
