//! `lb-agent profile` under traffic; afterwards the kernel stops counting.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::programs::loaded_programs;
use lb_tests::{agent, client::ask_http, wait_for};
use serde_json::Value;

use crate::bed::{Bed, WEB, http};

fn ask_for(bed: &Bed, time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        ask_http(&bed.cluster.client, http(WEB[0])).unwrap();
    }
}

/// Number of runs of a program that the kernel has counted.
fn runs(id: u64) -> u64 {
    // Programs of other tests come and go.
    let mut programs = loaded_programs().filter_map(Result::ok);
    programs.find(|info| u64::from(info.id()) == id).unwrap().run_count()
}

#[test]
fn profile_counts_program_runs_only_while_it_runs() {
    let bed = Bed::with_web(&["pod1"]);
    let (start, done) = (Instant::now(), AtomicBool::new(false));
    let profile: Value = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                ask_for(&bed, Duration::from_millis(10));
            }
        });
        let profile = bed.agent.as_ref().unwrap().json(&["profile", "--seconds", "1"]);
        done.store(true, Ordering::Relaxed);
        profile.unwrap()
    });
    let took = start.elapsed().as_secs_f64();
    let programs = profile["programs"].as_array().unwrap();
    let of = |name: &str| programs.iter().find(|program| program["program"] == name).unwrap();
    for name in ["tc_ingress", "tc_egress"] {
        let program = of(name);
        assert!(program["runs"].as_u64().unwrap() > 10, "{profile:#}");
        let nanoseconds = program["averageNanoseconds"].as_f64().unwrap();
        assert!((10.0..1e6).contains(&nanoseconds), "{profile:#}");
        let cpus = program["runsPerSecond"].as_f64().unwrap() * nanoseconds / 1e9;
        assert!((cpus - program["cpus"].as_f64().unwrap()).abs() < 1e-6, "{profile:#}");
    }
    let seconds = profile["seconds"].as_f64().unwrap();
    assert!((0.9..took).contains(&seconds), "{seconds} s of a command that took {took} s");
    assert!(
        programs.iter().any(|program| program["program"] == "sock_connect4"),
        "socket programs are included: {profile:#}"
    );

    // Killing a `profile` process also stops the kernel's counting.
    let id = of("tc_ingress")["programId"].as_u64().unwrap();
    let settings = bed.cluster.agent_settings(1);
    let mut command = bed.cluster.node1.command(agent::binary());
    command.args(["profile", "--seconds", "600", "-o", "json", "--bpffs"]).arg(&settings.bpffs);
    let mut child = command.spawn().unwrap();
    let before = runs(id);
    let counts = || {
        ask_for(&bed, Duration::from_millis(10));
        (runs(id) > before).then_some(())
    };
    wait_for(Duration::from_secs(20), counts).expect("it counts runs");
    child.kill().unwrap();
    child.wait().unwrap();
    let after = runs(id);
    ask_for(&bed, Duration::from_millis(100));
    assert_eq!(runs(id), after, "the kernel still counts runs");
}
