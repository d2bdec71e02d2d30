"""What Triton is told of this library's device: that it compiles nothing for it, in words.

Triton asks each package with an entry point `triton.backends` for a compiler and a driver, and takes the one driver
that says it is active. Without one it says "0 active drivers", to the user of a device that it has never heard of.
"""
