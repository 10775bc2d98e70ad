//! Everything that touches the kernel: maps, programs, pins, devices.
