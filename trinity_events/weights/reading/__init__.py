"""Reading of a version: from parts, or the files of a checkpoint, to verified bytes."""
