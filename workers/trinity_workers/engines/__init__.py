"""Training engines, which hold and train the model. Each module is imported where it is used."""
