"""The loop that decides what runs next: receive, choose, launch, process the previous result."""
