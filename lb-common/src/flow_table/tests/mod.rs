//! Tests of the flow table: in a model of the memory (`model`), under load on two CPUs (`stress`), and of the spread of
//! its hash (`spread`).

mod model;
mod spread;
mod stress;
