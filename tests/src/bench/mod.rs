//! What the benchmarks share: the machine, figures and their targets, plots.

pub mod figure;
pub mod machine;
pub mod plot;

pub use self::{
    figure::{Figure, Quantile, Samples, Unit},
    machine::Machine,
    plot::{Bar, Plot},
};
