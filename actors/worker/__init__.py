"""The worker: pulls jobs from the server, scores what is offered, runs what it is assigned."""
