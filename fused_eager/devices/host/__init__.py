"""The host: CPU tensors in place, in memory that ATen and everybody else can get at. All that is true of that alone, of
glibc and of Linux lies here."""
