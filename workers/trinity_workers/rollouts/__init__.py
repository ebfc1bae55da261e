"""Episodes: from a question to answers with their rewards."""
