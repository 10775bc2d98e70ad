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
