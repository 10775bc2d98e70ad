//! What the documents promise and name exists.

use std::{fs, path::Path};

use lb_common::conntrack::Phase;

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).expect("a document of the repository")
}

/// All Rust sources below a folder, as one text.
fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder)
        .expect("a folder of the repository")
        .map(|entry| entry.expect("an entry").path());
    entries.fold(String::new(), |text, path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            text + &sources(&path)
        } else if name.ends_with(".rs") {
            text + &fs::read_to_string(&path).expect("a source")
        } else {
            text
        }
    })
}

/// The Rust sources below a folder, each with its path.
fn files(folder: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(folder).expect("a folder of the repository");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| {
            if path.is_dir() {
                files(&path)
            } else {
                vec![(path.display().to_string(), fs::read_to_string(&path).expect("a source"))]
            }
        })
        .collect()
}

#[test]
fn the_tests_that_the_architecture_names_exist() {
    let architecture = read("ARCHITECTURE.md");
    let (_, invariants) = architecture.split_once("## Invariants").expect("the section");
    let (invariants, _) = invariants.split_once("\n## ").expect("the end of the section");
    let guards = invariants.lines().filter_map(|line| line.rsplit_once(" | ")).map(|(_, guards)| guards);
    let names: Vec<&str> = guards
        .flat_map(|guards| guards.split('`').skip(1).step_by(2))
        .filter(|name| !name.contains('/'))
        .collect();
    assert!(names.len() > 20, "the table of invariants has another form");
    let sources = sources(repository());
    for name in names {
        assert!(sources.contains(&format!("fn {name}(")), "no test is called {name}");
    }
}

#[test]
fn the_tests_that_the_page_about_reliability_names_exist() {
    let page = read("docs/reliability.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| fault "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 15, "the table has another form");
    let sources = sources(repository());
    for row in rows {
        let [fault, promise, tests, figure] = row[..] else { panic!("not four cells: {row:?}") };
        assert!(!fault.is_empty() && !promise.is_empty() && !figure.is_empty(), "{row:?}");
        let names: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test of: {fault}");
        for name in names {
            assert!(sources.contains(&format!("fn {name}(")), "no test is called {name}");
        }
    }
}

/// CLOCK_REALTIME jumps. What lives for some time is measured by clocks that do not; the calendar is for people, certificates
/// and metrics, and in these files alone.
#[test]
fn no_clock_that_jumps_decides_anything() {
    let ebpf = sources(&repository().join("lb-ebpf/src")) + &sources(&repository().join("lb-common/src"));
    for clock in ["bpf_ktime_get_tai", "SystemTime", "CLOCK_REALTIME"] {
        assert!(!ebpf.contains(clock), "the data plane asks for {clock}");
    }
    assert!(ebpf.contains("bpf_ktime_get_coarse_ns") && ebpf.contains("bpf_jiffies64"));
    assert!(read("lb-agent/src/datapath/conntrack.rs").contains("ClockId::Monotonic"));
    let calendar = "SystemTime::now|Timestamp::now|ClockId::Realtime|Zoned::now";
    let core = sources(&repository().join("lb-core/src"));
    assert!(calendar.split('|').all(|call| !core.contains(call)), "the plan knows no time");
    for (file, text) in files(&repository().join("lb-agent/src")) {
        let shown = file.contains("/commands/") || CALENDARS.iter().any(|known| file.ends_with(known));
        let asks = calendar
            .split('|')
            .any(|call| text.split("#[cfg(test)]").next().unwrap_or_default().contains(call));
        assert!(shown || !asks || file.contains("/tests"), "{file} asks for the time of day");
    }
}

/// Files that tell people, or who scrapes metrics, what time it is, as commands do.
const CALENDARS: [&str; 7] = [
    "daemon/mod.rs",
    "daemon/shortage.rs",
    "daemon/state.rs",
    "health/freshness.rs",
    "kubernetes/run.rs",
    "metrics/mod.rs",
    "zpages.rs",
];

#[test]
fn the_timeouts_in_the_documents_are_those_of_the_code() {
    let maps = read("docs/maps.md");
    for (row, phases) in [
        ("TCP opening, accepted", &[Phase::Opening, Phase::Accepted][..]),
        ("TCP established", &[Phase::Established]),
        ("TCP half-closed", &[Phase::HalfClosed]),
        ("TCP time-wait", &[Phase::TimeWait]),
        ("TCP closed (reset)", &[Phase::Closed]),
        ("UDP unreplied", &[Phase::Unreplied]),
        ("UDP replied", &[Phase::Replied]),
        ("UDP stream", &[Phase::Stream]),
    ] {
        let line = maps.lines().find(|line| line.starts_with(&format!("| {row} |"))).expect(row);
        let seconds: String = line.chars().filter(char::is_ascii_digit).collect();
        for phase in phases {
            assert_eq!(seconds, phase.timeout_seconds().to_string(), "{row}");
        }
    }
}
