"""Values and the memory they are in: the program's, the device's, and what glibc keeps."""
