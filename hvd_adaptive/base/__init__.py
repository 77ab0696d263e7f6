"""What every module may use: errors, checks of values, copies between devices, random streams."""
