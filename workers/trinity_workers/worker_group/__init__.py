"""Groups of workers over Ray actors, and the dispatch of data to their ranks."""
