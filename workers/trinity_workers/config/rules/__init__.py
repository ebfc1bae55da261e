"""Rules between settings: contradictions, each in a sentence that names the way out."""
