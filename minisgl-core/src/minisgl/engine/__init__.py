"""One engine a device: plans in, launches on the device, sampled tokens out."""
