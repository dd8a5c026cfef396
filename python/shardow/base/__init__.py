"""What every room needs and what knows neither torch nor the engine: checks of options, warnings, signals that wait,
progress.

May import: errors."""
