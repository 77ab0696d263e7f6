"""Define what every module uses: errors, checks, copies between devices, random streams."""
