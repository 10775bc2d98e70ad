//! The control plane as a whole, against a kernel that is a few maps.

mod golden;
mod kernel;
mod properties;
mod scale;
mod scenarios;
mod world;
