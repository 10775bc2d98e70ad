//! The command `flows`: reads a flow log.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use comfy_table::{Cell, Table};
use flate2::read::MultiGzDecoder;
use serde::Serialize;

use super::output::{NOTHING, print_json, print_table, scaled, table};
use crate::{
    cli::{FlowsArgs, TableOrJson, TopFlows},
    flow_log::{LogLine, Record, StatsRecord, Volume, rotated},
};

/// Number of rotated files (`FILE.1` and so on) that `flows` looks for.
const MAX_ROTATED: u32 = 1000;
/// Maximum length in bytes of a line that `flows` keeps in memory; longer lines do not come from a flow log.
const MAX_LINE: u64 = 64 << 10;

/// Runs `flows`.
///
/// # Errors
/// The file cannot be read, or standard output cannot be written.
pub fn flows(args: &FlowsArgs) -> anyhow::Result<()> {
    let mut report = Report::new(args);
    for (name, input) in inputs(&args.file)? {
        report.read(input).with_context(|| format!("cannot read the flow log {name}"))?;
    }
    report.warn();
    match args.top {
        Some(_) => print_sums(&report.largest(), args.output),
        None => print_last(&Vec::from(report.last), args.output),
    }
}

/// Opens the files of a flow log, the oldest first; each with its name.
fn inputs(file: &Path) -> anyhow::Result<Vec<(String, Box<dyn BufRead>)>> {
    if file == Path::new("-") {
        return Ok(vec![("-".to_owned(), Box::new(BufReader::new(io::stdin())))]);
    }
    let mut inputs = Vec::new();
    for number in (1..=MAX_ROTATED).rev() {
        let plain = rotated(file, number);
        let mut packed = plain.clone().into_os_string();
        packed.push(".gz");
        for path in [PathBuf::from(packed), plain] {
            if path.exists() {
                inputs.push(open(&path)?);
            }
        }
    }
    inputs.push(open(file)?);
    Ok(inputs)
}

fn open(path: &Path) -> anyhow::Result<(String, Box<dyn BufRead>)> {
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| format!("cannot open the flow log {name}"))?;
    let is_packed = path.extension().is_some_and(|extension| extension == "gz");
    let input: Box<dyn BufRead> = if is_packed {
        Box::new(BufReader::new(MultiGzDecoder::new(file)))
    } else {
        Box::new(BufReader::new(file))
    };
    Ok((name, input))
}

/// The result of `flows`, computed from the lines read so far.
#[derive(Default)]
struct Report {
    top: Option<TopFlows>,
    /// Maximum number of rows that `flows` prints; 0 means all.
    limit: usize,
    /// Without `--top`: the last `limit` lines about connections, or all of them if `limit` is 0.
    last: VecDeque<String>,
    sums: BTreeMap<String, Sums>,
    /// Number of lines that are cut off or do not have the format of a flow log.
    unreadable: u64,
    /// Lines and events that the agents of all nodes have lost, according to the statistics that they write to the log.
    loss: Loss,
    /// Numbers of written lines, dropped lines and lost events in each node's last statistics.
    counts_before: BTreeMap<String, [u64; 3]>,
}

/// Numbers of lines ([`StatsRecord::dropped_lines`]) and events ([`StatsRecord::lost_events`]) that agents have lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Loss {
    lines: u64,
    events: u64,
}

/// Connections, packets and bytes of one client, Service or backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Sums {
    /// Number of connections that have ended.
    ended: u64,
    #[serde(flatten)]
    volume: Volume,
}

#[derive(Serialize)]
struct NamedSums<'a> {
    name: &'a str,
    #[serde(flatten)]
    sums: Sums,
}

impl Report {
    fn new(args: &FlowsArgs) -> Self {
        Self { top: args.top, limit: args.limit, ..Self::default() }
    }

    fn read(&mut self, mut input: impl BufRead) -> io::Result<()> {
        let mut line = Vec::new();
        loop {
            line.clear();
            if input.by_ref().take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
                return Ok(());
            }
            let text = line.trim_ascii();
            if !text.is_empty() {
                self.note(text);
            }
        }
    }

    fn note(&mut self, text: &[u8]) {
        match serde_json::from_slice::<LogLine<'_>>(text) {
            Ok(LogLine::Open(record)) => self.add(&record, text, 0),
            Ok(LogLine::End(record)) => self.add(&record, text, 1),
            Ok(LogLine::Stats(stats)) => self.note_loss(&stats),
            Err(_) => self.unreadable += 1,
        }
    }

    /// Adds what the node's agent has lost since its last statistics. A restarted agent counts from 0 again: a count
    /// that is smaller than before shows the restart.
    fn note_loss(&mut self, stats: &StatsRecord<'_>) {
        let now = [stats.lines, stats.dropped_lines, stats.lost_events];
        let last = self.counts_before.insert(stats.node.clone().into_owned(), now).unwrap_or_default();
        let has_restarted = now.iter().zip(last).any(|(now, last)| *now < last);
        let [_, lines, events] =
            if has_restarted { now } else { std::array::from_fn(|at| now[at] - last[at]) };
        self.loss.lines = self.loss.lines.saturating_add(lines);
        self.loss.events = self.loss.events.saturating_add(events);
    }

    fn add(&mut self, record: &Record<'_>, text: &[u8], ended: u64) {
        let Some(top) = self.top else {
            self.last.push_back(String::from_utf8_lossy(text).into_owned());
            if self.limit > 0 && self.last.len() > self.limit {
                self.last.pop_front();
            }
            return;
        };
        let sums = self.sums.entry(name(record, top)).or_default();
        let Volume { packets_sent, bytes_sent, packets_answered, bytes_answered } =
            record.since_last.unwrap_or(record.total);
        sums.ended += ended;
        // Lines may come from anywhere, so a count may have any value: saturates instead of overflowing.
        let add = |sum: &mut u64, count: u64| *sum = sum.saturating_add(count);
        add(&mut sums.volume.packets_sent, packets_sent);
        add(&mut sums.volume.bytes_sent, bytes_sent);
        add(&mut sums.volume.packets_answered, packets_answered);
        add(&mut sums.volume.bytes_answered, bytes_answered);
    }

    /// The `limit` clients, Services or backends with the most bytes, the largest first; all if `limit` is 0.
    fn largest(&self) -> Vec<NamedSums<'_>> {
        let mut rows: Vec<_> = self.sums.iter().map(|(name, sums)| NamedSums { name, sums: *sums }).collect();
        let bytes =
            |row: &NamedSums<'_>| row.sums.volume.bytes_sent.saturating_add(row.sums.volume.bytes_answered);
        rows.sort_by_key(|row| std::cmp::Reverse((bytes(row), row.sums.ended)));
        if self.limit > 0 {
            rows.truncate(self.limit);
        }
        rows
    }

    /// Prints to standard error how many lines are unreadable, and what agents have lost.
    fn warn(&self) {
        if self.unreadable > 0 {
            eprintln!("{} lines are cut off or are no lines of a flow log; left out", self.unreadable);
        }
        if self.loss.lines > 0 {
            eprintln!("the log is incomplete: agents dropped {} lines", self.loss.lines);
        }
        if self.loss.events > 0 {
            eprintln!(
                "the log is incomplete: agents lost {} events, so connections may lack their start and reason, or their \
                 line",
                self.loss.events
            );
        }
    }
}

fn name(record: &Record<'_>, top: TopFlows) -> String {
    match top {
        TopFlows::Clients => record.client.to_string(),
        TopFlows::Services => service(record),
        TopFlows::Backends => {
            let backend = std::net::SocketAddr::new(record.backend, record.backend_port);
            record.pod.as_ref().map_or_else(|| backend.to_string(), |pod| format!("{backend} ({pod})"))
        }
    }
}

/// `NAMESPACE/NAME:PORT/PROTOCOL` of the connection's Service, or the virtual address if the Service is unknown.
fn service(record: &Record<'_>) -> String {
    let protocol = &record.protocol;
    match (&record.namespace, &record.service, record.port.as_deref().unwrap_or_default()) {
        (Some(namespace), Some(name), "") => format!("{namespace}/{name}/{protocol}"),
        (Some(namespace), Some(name), port) => format!("{namespace}/{name}:{port}/{protocol}"),
        _ => format!("{}/{protocol}", std::net::SocketAddr::new(record.vip, record.vip_port)),
    }
}

fn print_sums(rows: &[NamedSums<'_>], output: TableOrJson) -> anyhow::Result<()> {
    if output == TableOrJson::Json {
        return print_json(&rows);
    }
    let mut table =
        table(&["NAME", "ENDED", "PACKETS SENT", "BYTES SENT", "PACKETS ANSWERED", "BYTES ANSWERED"]);
    for NamedSums { name, sums } in rows {
        let Sums { ended, volume } = sums;
        let numbers =
            [*ended, volume.packets_sent, volume.bytes_sent, volume.packets_answered, volume.bytes_answered];
        let cells =
            [Cell::new(printable(name))].into_iter().chain(numbers.map(|number| Cell::new(scaled(number))));
        table.add_row(cells.collect::<Vec<_>>());
    }
    print_table(&table)
}

/// Text of a log that is safe to print: the lines may come from anywhere, and must not control the terminal.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

fn print_last(lines: &[String], output: TableOrJson) -> anyhow::Result<()> {
    if output == TableOrJson::Json {
        let values = lines.iter().map(|line| serde_json::from_str(line));
        return print_json(&values.collect::<Result<Vec<serde_json::Value>, _>>()?);
    }
    print_table(&table_of_last(lines))
}

fn table_of_last(lines: &[String]) -> Table {
    let mut table =
        table(&["TIME", "CLIENT", "SERVICE", "BACKEND", "VERDICT", "SENT", "ANSWERED", "SECONDS", "END"]);
    for line in lines {
        let Ok(LogLine::Open(record) | LogLine::End(record)) = serde_json::from_str::<LogLine<'_>>(line)
        else {
            continue;
        };
        let socket = |ip, port| std::net::SocketAddr::new(ip, port).to_string();
        let Volume { bytes_sent, bytes_answered, .. } = record.total;
        table.add_row([
            format!("{:.0}", record.time),
            socket(record.client, record.client_port),
            printable(&service(&record)),
            socket(record.backend, record.backend_port),
            printable(record.verdict.as_deref().unwrap_or(NOTHING)),
            scaled(bytes_sent),
            scaled(bytes_answered),
            record.duration.map_or_else(|| NOTHING.to_owned(), |seconds| format!("{seconds:.1}")),
            record.end.map_or("open", crate::flow_log::EndReason::as_str).to_owned(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write as _};

    use flate2::{Compression, write::GzEncoder};

    use super::*;

    fn line(event: &str, client: &str, flow: u32, bytes: u64, since_last: Option<u64>) -> String {
        let volume = |bytes: u64| {
            format!(r#""packets_sent":1,"bytes_sent":{bytes},"packets_answered":0,"bytes_answered":0"#)
        };
        let since_last =
            since_last.map_or_else(String::new, |bytes| format!(r#","since_last":{{{}}}"#, volume(bytes)));
        format!(
            concat!(
                r#"{{"event":"{}","version":1,"time":"2026-11-25T12:00:00Z","node":"a","flow":"{}","protocol":"TCP","#,
                r#""client":"{}","client_port":1,"vip":"10.96.0.1","vip_port":80,"namespace":"default","service":"web","#,
                r#""port":"","backend":"10.1.0.5","backend_port":8080,"new_field":[1],{}{}}}"#
            ),
            event,
            flow,
            client,
            volume(bytes),
            since_last
        ) + "\n"
    }

    fn args(file: &Path, top: Option<TopFlows>, limit: usize) -> FlowsArgs {
        FlowsArgs { file: file.to_owned(), top, limit, output: TableOrJson::Table }
    }

    fn report(file: &Path, top: Option<TopFlows>, limit: usize) -> Report {
        let mut report = Report::new(&args(file, top, limit));
        for (_, input) in inputs(file).unwrap() {
            report.read(input).unwrap();
        }
        report
    }

    #[test]
    fn rotated_files_are_summed_and_each_byte_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(line("open", "192.0.2.1", 1, 100, None).as_bytes()).unwrap();
        fs::write(folder.path().join("flows.json.2.gz"), packed.finish().unwrap()).unwrap();
        fs::write(folder.path().join("flows.json.1"), line("open", "192.0.2.1", 1, 250, Some(150))).unwrap();
        let ends = line("end", "192.0.2.1", 1, 300, Some(50)) + &line("end", "192.0.2.2", 2, 299, None);
        fs::write(&file, ends).unwrap();
        let report = report(&file, Some(TopFlows::Clients), 0);
        let rows: Vec<_> = report
            .largest()
            .iter()
            .map(|row| (row.name.to_owned(), row.sums.ended, row.sums.volume.bytes_sent))
            .collect();
        assert_eq!(rows, [("192.0.2.1".to_owned(), 1, 300), ("192.0.2.2".to_owned(), 1, 299)]);
    }

    #[test]
    fn sum_of_huge_counts_ends_at_the_largest_number() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let huge = |flow| line("end", "192.0.2.1", flow, u64::MAX, None);
        fs::write(&file, huge(1) + &huge(2)).unwrap();
        let report = report(&file, Some(TopFlows::Clients), 0);
        assert_eq!(report.largest()[0].sums.volume.bytes_sent, u64::MAX);
    }

    #[test]
    fn texts_of_a_line_do_not_control_the_terminal() {
        let hostile = line("end", "192.0.2.1", 1, 100, None)
            .replace("\"web\"", "\"web\\u001b[2J\"")
            .replace("\"new_field\":[1]", "\"verdict\":\"\\u001b]0;x\\u0007\"");
        let shown = table_of_last(&[hostile]).to_string();
        assert!(shown.contains("web?[2J") && shown.contains("?]0;x?"), "{shown}");
        assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
    }

    #[test]
    fn torn_and_foreign_lines_are_left_out_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let whole = line("end", "192.0.2.1", 1, 100, None);
        let stats = r#"{"event":"stats","version":1,"time":"2026-11-25T12:00:00Z","node":"a","lines":1,"dropped_lines":7,"lost_events":0}"#;
        fs::write(&file, format!("{whole}{{\"event\":\"later\"}}\nnot json\n{stats}\n{}", &whole[..90]))
            .unwrap();
        let report = report(&file, None, 20);
        assert_eq!((report.last.len(), report.unreadable, report.loss.lines), (1, 3, 7));
    }

    #[test]
    fn losses_of_all_nodes_and_of_restarted_agents_are_summed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let stats = |(node, lines, dropped): (&str, u64, u64)| {
            let lost = 10 * dropped;
            format!(
                r#"{{"event":"stats","version":1,"time":"2026-11-25T12:00:00Z","node":"{node}","lines":{lines},"dropped_lines":{dropped},"lost_events":{lost}}}"#
            ) + "\n"
        };
        let before = [("a", 1, 3), ("b", 1, 5), ("a", 1000, 7), ("b", 1, 5)];
        // Agent `a` has restarted twice. After the second restart it has lost more than before, but written fewer
        // lines.
        let after = [("a", 1000, 2), ("a", 1000, 4), ("a", 50, 10)];
        let lines: String = before.into_iter().chain(after).map(stats).collect();
        fs::write(&file, lines).unwrap();
        let lost = 7 + 5 + 4 + 10;
        assert_eq!(report(&file, None, 20).loss, Loss { lines: lost, events: 10 * lost });
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let lines: String = (0..50).map(|flow| line("end", "192.0.2.1", flow, 1, None)).collect();
        fs::write(&file, lines).unwrap();
        let last = report(&file, None, 2).last;
        let flow = |line: &String| serde_json::from_str::<serde_json::Value>(line).unwrap()["flow"].clone();
        assert_eq!(last.iter().map(flow).collect::<Vec<_>>(), ["48", "49"]);
    }
}
