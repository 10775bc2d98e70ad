//! Compares the documents with the code: the files, items, tests and local links that the documents name must exist.
//! The table of [`Outcome`]s and the timeouts in the documents must match the code.

use std::{collections::BTreeSet, fs, path::Path};

use lb_common::{Outcome, Verdict, conntrack::Phase};

use self::files::paths;

#[path = "support/files.rs"]
mod files;

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn read(path: &str) -> String {
    fs::read_to_string(repository().join(path)).expect("a document of the repository")
}

/// The Rust sources below a folder, each with its path.
fn files(folder: &Path) -> Vec<(String, String)> {
    paths(folder, ".rs")
        .into_iter()
        .map(|path| (path.display().to_string(), fs::read_to_string(&path).expect("a source")))
        .collect()
}

/// All Rust sources below a folder, as one text.
fn sources(folder: &Path) -> String {
    files(folder).into_iter().map(|(_, text)| text).collect()
}

/// The code spans of a text, which are enclosed in backticks.
fn code_spans(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A document without its code blocks.
fn prose(document: &str) -> String {
    document.split("```").step_by(2).collect()
}

/// The text and the target of each Markdown link.
fn links(document: &str) -> Vec<(String, String)> {
    let prose = prose(document);
    let ends = prose.match_indices("](");
    ends.map(|(at, _)| {
        let text = prose[..at].rsplit('[').next().unwrap_or_default().to_owned();
        let target = prose[at + 2..].split(')').next().unwrap_or_default().to_owned();
        (text, target)
    })
    .collect()
}

/// The anchor that GitHub generates for a heading.
fn anchor(heading: &str) -> String {
    let text: String = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[test]
fn every_link_of_a_document_has_a_target() {
    for path in paths(repository(), ".md") {
        let document = fs::read_to_string(&path).expect("a document");
        for (_, target) in links(&document).into_iter().filter(|(_, target)| !target.contains(':')) {
            let (file, section) = target.split_once('#').unwrap_or((&target, ""));
            let linked = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            assert!(linked.exists(), "{}: no file {target}", path.display());
            if !section.is_empty() {
                let text = fs::read_to_string(&linked).expect("a linked document");
                let found =
                    text.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == section);
                assert!(found, "{}: no section {target}", path.display());
            }
        }
    }
}

#[test]
fn readme_and_architecture_are_short() {
    for (name, most) in [("README.md", 140), ("ARCHITECTURE.md", 150)] {
        let page = read(name);
        assert!(page.lines().count() <= most, "{name} has more than {most} lines");
    }
    let readme = read("README.md");
    let wide = readme.lines().find(|line| line.chars().count() > 120);
    assert_eq!(wide, None, "README.md has a line of more than 120 columns");
}

/// Whether `text` defines `item`: a function, module, constant, static, type or trait.
fn defines(text: &str, item: &str) -> bool {
    ["fn", "mod", "const", "static", "struct", "enum", "trait", "type"].iter().any(|kind| {
        let definition = format!("{kind} {item}");
        let mut ends =
            text.match_indices(&definition).map(|(at, _)| text[at + definition.len()..].chars().next());
        ends.any(|end| end.is_none_or(|letter| !letter.is_alphanumeric() && letter != '_'))
    })
}

/// The pairs `item` in `path/of/a/file.rs` of a text; the path may be a link.
fn items_in_files(prose: &str) -> Vec<(String, String)> {
    let text = prose.split_whitespace().collect::<Vec<_>>().join(" ").replace("` in [`", "` in `");
    let pairs = text.match_indices("` in `").map(|(at, between)| {
        let (before, after) = (&text[..at], &text[at + between.len()..]);
        (before.rsplit('`').next().unwrap_or_default(), after.split('`').next().unwrap_or_default())
    });
    let is_name =
        |name: &str| !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_');
    pairs
        .filter(|(item, file)| is_name(item) && file.ends_with(".rs"))
        .map(|(item, file)| (item.to_owned(), file.to_owned()))
        .collect()
}

/// Whether one of the sources has `module::item`, `path/of/file.rs::item` or `Type::field`.
fn has(sources: &[(String, String)], module: &str, item: &str) -> bool {
    let name = module.rsplit("::").next().unwrap_or_default();
    let is_module = |path: &str, text: &str| {
        let mut parts = path.trim_end_matches(".rs").split('/');
        parts.any(|part| part == name || part == name.replace('_', "-"))
            || text.contains(&format!("mod {name} {{"))
    };
    if name.starts_with(char::is_uppercase) {
        return sources.iter().any(|(_, text)| defines(text, name) && text.contains(item));
    }
    sources.iter().any(|(path, text)| {
        let searched = if module.ends_with(".rs") {
            path.ends_with(&format!("/{module}"))
        } else {
            is_module(path, text)
        };
        searched && (defines(text, item) || path.ends_with(&format!("/{item}.rs")))
    })
}

#[test]
fn files_and_functions_that_documents_name_exist() {
    let sources = files(repository());
    let (mut checked, mut items) = (0, 0);
    let first = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| repository().join(name));
    for page in first.into_iter().chain(paths(&repository().join("docs"), ".md")) {
        let name = page.display();
        let document = fs::read_to_string(&page).expect("a document");
        // If the text of a link is `file.rs::function`, the linked file or folder must define the function.
        for (text, target) in links(&document) {
            let Some((_, function)) = text.trim_matches('`').split_once("::") else { continue };
            let linked = page.with_file_name(&target);
            let text = fs::read_to_string(&linked).unwrap_or_else(|_| self::sources(&linked));
            assert!(
                [format!("fn {function}("), format!("fn {function}<")]
                    .iter()
                    .any(|start| text.contains(start)),
                "{name}: {target} has no function {function}"
            );
            checked += 1;
        }
        // Everywhere else, a code span may name `module::item` or `path/of/a/file.rs`.
        let prose = prose(&document);
        for span in code_spans(&prose) {
            let is_path = |letter: char| letter.is_alphanumeric() || "_-:./".contains(letter);
            // An IPv6 address begins with a colon; a path never does.
            if span.starts_with(':') || !span.chars().all(is_path) {
                continue;
            }
            if let Some((module, item)) = span.rsplit_once("::") {
                assert!(has(&sources, module, item), "{name}: nothing is called {span}");
                checked += 1;
            } else if span.contains('/') && span.ends_with(".rs") {
                let known = sources.iter().any(|(path, _)| path.ends_with(&format!("/{span}")));
                assert!(known, "{name}: no file {span}");
                checked += 1;
            }
        }
        for (item, file) in items_in_files(&prose) {
            let found = sources
                .iter()
                .any(|(path, text)| path.ends_with(&format!("/{file}")) && defines(text, &item));
            assert!(found, "{name}: `{item}` is not in {file}");
            items += 1;
        }
    }
    assert!(
        checked > 30 && items > 10,
        "{checked} and {items}: the documents name files and items in another form"
    );
}

/// A page without the parts that tests write between the markers `<!-- written by …` and `<!-- end -->`.
fn without_written(page: &str) -> String {
    let parts = page.split("<!-- written by ");
    parts.map(|part| part.split_once("<!-- end -->").map_or(part, |(_, after)| after)).collect()
}

/// Checks that the last cell of every row names tests or files that exist. Skips rows that begin with `header`.
fn assert_rows_name_tests(page: &str, header: &str, least: usize) {
    let text = without_written(&read(page));
    let rows: Vec<&str> =
        text.lines().filter(|line| line.starts_with("| ") && !line.starts_with(header)).collect();
    assert!(rows.len() > least, "the tables of {page} have another form");
    let sources = sources(repository());
    for row in rows {
        let (_, guards) = row.trim_end_matches(" |").rsplit_once(" | ").expect("two cells");
        let names = code_spans(guards);
        assert!(!names.is_empty(), "nothing guards: {row}");
        for name in names {
            let exists = if name.contains('/') {
                repository().join(name).exists()
            } else {
                sources.contains(&format!("fn {name}("))
            };
            assert!(exists, "no test is called {name}");
        }
    }
}

#[test]
fn tests_that_guard_invariants_exist() {
    assert_rows_name_tests("docs/invariants.md", "| invariant ", 80);
}

#[test]
fn tests_that_the_security_page_names_exist() {
    assert_rows_name_tests("docs/security.md", "| attempt ", 40);
    let page = read("docs/security.md");
    let (_, trusted) = page.split_once("\n## What is trusted\n").expect("the section");
    let section = trusted.split("\n## ").next().unwrap_or_default();
    let sources = sources(repository());
    for name in code_spans(section).into_iter().filter(|span| span.contains('_')) {
        assert!(sources.contains(&format!("fn {name}(")), "no test is called {name}");
    }
}

#[test]
fn tests_of_differences_from_kube_proxy_exist() {
    let page = read("docs/kube-proxy.md");
    let (_, table) = page.split_once("## What differs").expect("the section");
    let rows: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|')?.rsplit_once(" | "))
        .map(|(_, tests)| tests)
        .collect();
    assert!(rows.len() > 10, "the table has another form");
    for name in rows.into_iter().flat_map(code_spans) {
        let (module, test) = name.split_once("::").unwrap_or((name, ""));
        let path = repository().join(format!("tests/tests/netns/{module}.rs"));
        let source =
            fs::read_to_string(path).unwrap_or_else(|error| panic!("no test module {module}: {error}"));
        assert!(test.is_empty() || source.contains(&format!("fn {test}(")), "no test is called {name}");
    }
}

#[test]
fn tests_that_the_reliability_page_names_exist() {
    let page = read("docs/reliability.md");
    // Other tables have figures only.
    let faults = page.split("\n\n").filter(|table| table.starts_with("| fault "));
    let rows: Vec<Vec<&str>> = faults
        .flat_map(|table| table.lines().skip(2))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert!(rows.len() > 50, "the tables have another form: {} rows", rows.len());
    let sources = sources(repository());
    for row in rows {
        let [fault, promise, tests, figure] = row[..] else { panic!("not four cells: {row:?}") };
        assert!(!fault.is_empty() && !promise.is_empty() && !figure.is_empty(), "{row:?}");
        let names = code_spans(tests);
        assert!(!names.is_empty(), "no test of: {fault}");
        for name in names {
            assert!(sources.contains(&format!("fn {name}(")), "no test is called {name}");
        }
    }
}

/// The page abbreviates names: `AWS-` is a prefix, and a name that begins with `-` or `…` shares its beginning with the
/// name before it.
#[test]
fn annotations_page_names_every_annotation_that_the_code_knows() {
    const AWS: &str = "service.beta.kubernetes.io/aws-load-balancer-";
    const PREFIXES: [&str; 5] = [
        "lb.dev/",
        "service.beta.kubernetes.io/",
        "service.kubernetes.io/",
        "cloud.google.com/",
        "networking.gke.io/",
    ];
    let page = read("docs/annotations.md");
    let mut named = BTreeSet::new();
    let mut whole = String::new();
    for span in code_spans(&page) {
        let name = span.split(':').next().unwrap_or_default().replace("AWS-", AWS);
        if let Some(end) = name.strip_prefix('…') {
            named.extend(whole.rsplit_once('/').map(|(beginning, _)| format!("{beginning}{end}")));
        } else if name.starts_with('-') {
            let beginnings = whole.match_indices('-').map(|(at, _)| &whole[..at]).chain([whole.as_str()]);
            named.extend(beginnings.map(|beginning| format!("{beginning}{name}")));
        } else if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            named.insert(name.clone());
            whole = name;
        }
    }
    let convert = files(&repository().join("lb-core/src/convert"));
    // The names in mod.rs are those of labels.
    let readers = convert.iter().filter(|(path, _)| !path.ends_with("/mod.rs"));
    let code = readers.map(|(_, text)| text.split("#[cfg(test)]").next().unwrap_or_default());
    let annotations: BTreeSet<&str> = code
        .flat_map(|text| text.split('"').skip(1).step_by(2))
        .filter(|text| PREFIXES.iter().any(|prefix| text.starts_with(prefix)))
        .filter(|text| !text.contains(' ') && !text.ends_with(['/', '-']))
        .collect();
    assert!(annotations.len() > 50, "{annotations:?}");
    let missing: Vec<&&str> = annotations.iter().filter(|annotation| !named.contains(**annotation)).collect();
    assert!(missing.is_empty(), "docs/annotations.md lacks {missing:?}");
}

/// CLOCK_REALTIME jumps, so monotonic clocks measure every lifetime. Only the files in [`CALENDARS`] and the commands
/// read the time of day, for example to show it to users, check certificates and export metrics.
#[test]
fn only_monotonic_clocks_decide() {
    let ebpf = sources(&repository().join("lb-ebpf/src")) + &sources(&repository().join("lb-common/src"));
    for clock in ["bpf_ktime_get_tai", "SystemTime", "CLOCK_REALTIME"] {
        assert!(!ebpf.contains(clock), "the data plane reads {clock}");
    }
    assert!(ebpf.contains("bpf_ktime_get_coarse_ns") && ebpf.contains("bpf_jiffies64"));
    assert!(read("lb-datapath/src/state/conntrack/mod.rs").contains("ClockId::Monotonic"));
    let calendar = "SystemTime::now|Timestamp::now|ClockId::Realtime|Zoned::now";
    let core = sources(&repository().join("lb-core/src"));
    assert!(calendar.split('|').all(|call| !core.contains(call)), "the control plane reads a clock");
    let agent = ["lb-agent/src", "lb-datapath/src"].map(|folder| files(&repository().join(folder)));
    for (file, text) in agent.into_iter().flatten() {
        let shown = file.contains("/commands/") || CALENDARS.iter().any(|known| file.ends_with(known));
        let asks = calendar
            .split('|')
            .any(|call| text.split("#[cfg(test)]").next().unwrap_or_default().contains(call));
        assert!(shown || !asks || file.contains("/tests"), "{file} reads the time of day");
    }
}

/// Files of the agent, apart from its commands, that may read the time of day.
const CALENDARS: [&str; 14] = [
    "announce/report.rs",
    "daemon/shortage.rs",
    "daemon/start/servers.rs",
    "daemon/state.rs",
    "flow_log/writer.rs",
    "health/freshness.rs",
    "kubernetes/addresses/lease.rs",
    "kubernetes/announce/mod.rs",
    "kubernetes/names.rs",
    "kubernetes/run.rs",
    "metrics/mod.rs",
    "probe/board.rs",
    "probe/prober.rs",
    "zpages.rs",
];

#[test]
fn documented_outcomes_match_the_code() {
    let metrics = read("docs/metrics.md");
    let (_, rest) = metrics.split_once("\n## Outcomes\n").expect("the section");
    let section = rest.split("\n## ").next().unwrap_or_default();
    let rows: Vec<Vec<&str>> = section
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| index "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), Outcome::COUNT);
    for (row, outcome) in rows.into_iter().zip(Outcome::ALL) {
        let verdict = match outcome.verdict() {
            Verdict::Pass => "pass",
            Verdict::Bounce => "bounce",
            Verdict::Route => "route",
            Verdict::Drop => "drop",
            Verdict::Hold => "hold",
        };
        let [index, name, documented, meaning] = row[..] else { panic!("not four cells: {row:?}") };
        assert_eq!((index, name), (&*(outcome as usize).to_string(), &*format!("`{}`", outcome.as_str())));
        assert_eq!(documented, verdict, "{name}");
        assert!(!meaning.is_empty(), "{name}");
    }
}

#[test]
fn documented_timeouts_match_the_code() {
    let page = |name: &str| read(name).split_whitespace().collect::<Vec<_>>().join(" ");
    let mut wrong = wrong_timeouts_in_the_table_of_phases();
    let (opening, time_wait, stream) = (
        Phase::Opening.timeout_seconds(),
        Phase::TimeWait.timeout_seconds(),
        Phase::Stream.timeout_seconds(),
    );
    let [least, least_half_closed, least_stream] =
        [Phase::Opening, Phase::HalfClosed, Phase::Stream].map(Phase::least_timeout_seconds);
    assert_eq!(least_half_closed, least_stream);
    for (name, words) in [
        ("docs/maps.md", format!("valid for {stream} s after the last use")),
        (
            "docs/maps.md",
            format!(
                "idle for {least} seconds (half-closed, stream, established in a tunnel: {least_stream})"
            ),
        ),
        ("docs/annotations.md", format!("an idle UDP stream still expires after {stream} s")),
        ("docs/datapath.md", format!("at most {stream} s old")),
        ("docs/dsr.md", format!("FIN ({time_wait} s)")),
        ("docs/dsr.md", format!("after {opening} s of silence")),
        ("docs/kube-proxy.md", format!("[{opening} s](maps.md#flows-and-conntrack)")),
        ("docs/reliability.md", format!("after {least_stream} s without a packet, not after {stream} s")),
        ("docs/security.md", format!("entries give way in a full map after {least_stream} s")),
        ("docs/security.md", format!("they give way in a full map after {least_stream} s")),
    ] {
        if !page(name).contains(&words) {
            wrong.push(format!("{name} lacks \"{words}\""));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The rows of the table in docs/maps.md whose timeouts are not those of the code.
fn wrong_timeouts_in_the_table_of_phases() -> Vec<String> {
    let (maps, mut wrong) = (read("docs/maps.md"), Vec::new());
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
            let expected = phase.timeout_seconds();
            if seconds != expected.to_string() {
                wrong.push(format!("docs/maps.md has {seconds} s for \"{row}\", not {expected}"));
            }
        }
    }
    wrong
}
