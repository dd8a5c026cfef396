"""What every room needs and what knows neither torch nor the engine.

Checks of options, warnings at the user's line, signals that wait, progress.

May import: errors."""
