//! What the flow table promises: checked in a model of the memory (`model`), under load on two CPUs (`stress`), and in
//! figures (`spread`).

mod model;
mod spread;
mod stress;
