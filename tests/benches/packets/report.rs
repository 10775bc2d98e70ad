//! The results of the benchmark as tables, JSON and plots.

use std::{fs, path::Path};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use lb_tests::bench::{Bar, Machine, Plot, Quantile, Samples, figure::mark};
use serde::Serialize;

use crate::{
    baselines::Baseline,
    cases::Section,
    goals,
    rounds::{Contest, Plan, Round},
    two_cpus,
    verifier::Cost,
};

/// All results, as `--json` writes them. In JSON some fields keep the names of earlier releases.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    /// Number of the CPU on which the cases ran.
    pub(crate) cpu: usize,
    /// Load average of the last minute, read at the end of the benchmark.
    pub(crate) load_after: f64,
    /// Number of accepted rounds that each case should have.
    pub(crate) rounds: u32,
    /// Approximate seconds that a program ran in each round.
    pub(crate) slice: f64,
    /// Names of the builds: the measured one and, if any, the one that it is compared with.
    pub(crate) builds: Vec<String>,
    /// Results of the cases. Times are CPU time in nanoseconds per packet.
    pub(crate) cases: Vec<Row>,
    /// Results of two CPUs that use one flow table.
    pub(crate) two_cpus: Vec<two_cpus::Row>,
    /// For each build, the cost of loading each program.
    pub(crate) verifier: Vec<Vec<Cost>>,
}

/// The results of one case.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) section: Section,
    pub(crate) program: String,
    pub(crate) packet: String,
    /// Label of the fastest baseline.
    #[serde(rename = "floor_program")]
    baseline_program: &'static str,
    /// Time of a program that returns at once, with the same packets.
    #[serde(rename = "base")]
    overhead: Samples,
    /// Time of the measured program without the overhead.
    net: Samples,
    #[serde(rename = "floor_net")]
    baseline_net: Samples,
    /// Ratio of the program's net time to that of its fastest baseline.
    pub(crate) ratio: Samples,
    /// The comparisons with the other baselines: `ratio` is the program's net time divided by the baseline's net time.
    other_baselines: Vec<Comparison>,
    /// The comparison with the earlier build: `ratio` is the net time of this build's program divided by that of the
    /// earlier build's program. `None` if there is only one build.
    earlier: Option<Comparison>,
    dropped: u32,
    #[serde(rename = "target")]
    pub(crate) goal: Option<f64>,
    pub(crate) met: Option<bool>,
}

/// Another program that a case's program is compared with, and the result.
#[derive(Serialize)]
struct Comparison {
    program: String,
    net: Samples,
    ratio: Samples,
}

impl Comparison {
    fn new(program: &str, rounds: &[Round], net: impl Fn(&Round) -> f64) -> Self {
        Self {
            program: program.to_owned(),
            net: Samples::new(rounds.iter().map(&net).collect()),
            ratio: Samples::new(rounds.iter().map(|round| round.programs[0] / net(round)).collect()),
        }
    }

    /// Whether the program is slower or faster than the other one in every round, as text; empty if neither.
    fn verdict(&self) -> &'static str {
        if self.ratio.at(Quantile::Min) > 1.0 {
            "slower"
        } else if self.ratio.at(Quantile::Max) < 1.0 {
            "faster"
        } else {
            ""
        }
    }
}

impl Row {
    /// The results of `contest`. `builds` has the name of each build that takes part in the contest.
    pub(crate) fn new(contest: &Contest, builds: &[String]) -> Self {
        let (case, rounds) = (contest.case(), &contest.rounds);
        let samples = |value: fn(&Round) -> f64| Samples::new(rounds.iter().map(value).collect());
        let against = |(index, baseline): (usize, &Baseline)| {
            Comparison::new(baseline.label(), rounds, |round| round.baselines[index])
        };
        let mut baselines: Vec<(Baseline, Comparison)> =
            case.baselines.iter().copied().zip(case.baselines.iter().enumerate().map(against)).collect();
        baselines.sort_by(|(_, a), (_, b)| a.net.at(Quantile::Median).total_cmp(&b.net.at(Quantile::Median)));
        let (fastest, Comparison { net: baseline_net, ratio, .. }) = baselines.remove(0);
        Self {
            section: case.section,
            program: case.program.to_owned(),
            packet: case.packet.clone(),
            baseline_program: fastest.label(),
            overhead: samples(|round| round.program_overhead),
            net: samples(|round| round.programs[0]),
            baseline_net,
            other_baselines: baselines.into_iter().map(|(_, comparison)| comparison).collect(),
            earlier: builds.get(1).map(|name| Comparison::new(name, rounds, |round| round.programs[1])),
            dropped: contest.dropped,
            goal: case.goal,
            met: case.goal.map(|goal| ratio.at(Quantile::Median) <= goal),
            ratio,
        }
    }

    fn label(&self) -> String {
        format!("  {}, {}", self.program, self.packet)
    }

    fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.label()];
        cells.extend(spread(&self.net, 1));
        cells.push(median(&self.baseline_net, 1));
        cells.extend(spread(&self.ratio, 2));
        cells.push(self.other_baselines.first().map_or_else(String::new, |other| median(&other.ratio, 2)));
        cells.push(median(&self.overhead, 1));
        cells.push(format!("{}-{}", self.ratio.count(), self.dropped));
        cells.push(match (self.goal, self.met) {
            (Some(goal), Some(met)) => format!("{} ≤ {goal}", mark(met)),
            _ => String::new(),
        });
        cells
    }

    fn comparison_cells(&self, earlier: &Comparison) -> Vec<String> {
        let mut cells = vec![self.label(), median(&earlier.net, 1), median(&self.net, 1)];
        cells.extend(spread(&earlier.ratio, 2));
        cells.push(earlier.verdict().to_owned());
        cells
    }

    /// The bars of a plot for the program, for the other build's program (if any), and for the fastest baseline.
    fn bars(&self) -> Vec<Bar> {
        let bar = |label, samples: &Samples, is_reference| Bar {
            label,
            min: samples.at(Quantile::Min),
            median: samples.at(Quantile::Median),
            max: samples.at(Quantile::Max),
            is_reference,
        };
        let mut bars = vec![bar(format!("{}, {}", self.program, self.packet), &self.net, false)];
        if let Some(earlier) = &self.earlier {
            bars.push(bar(format!("the same at {}", earlier.program), &earlier.net, true));
        }
        bars.push(bar(format!("baseline: {}", self.baseline_program), &self.baseline_net, true));
        bars
    }
}

fn median(samples: &Samples, digits: usize) -> String {
    format!("{:.digits$}", samples.at(Quantile::Median))
}

/// Minimum, median and maximum of the samples, as text.
fn spread(samples: &Samples, digits: usize) -> [String; 3] {
    [Quantile::Min, Quantile::Median, Quantile::Max]
        .map(|quantile| format!("{:.digits$}", samples.at(quantile)))
}

/// A table whose columns, except the first and the last, are numbers.
pub(crate) fn table<T: ToString>(header: Vec<T>, rows: Vec<Vec<String>>) -> Table {
    let mut table = Table::new();
    let columns = header.len();
    table.load_preset(presets::NOTHING).force_no_tty();
    table.set_header(header.iter().map(ToString::to_string));
    table.add_rows(rows);
    for column in table.column_iter_mut().skip(1).take(columns.saturating_sub(2)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

const HEADER: [&str; 12] = [
    "ns per packet, net of overhead",
    "min",
    "median",
    "max",
    "baseline",
    "× min",
    "median",
    "max",
    "× other",
    "overhead",
    "rounds",
    "goal",
];

impl Report {
    /// A report without results.
    pub(crate) fn new(machine: Machine, cpu: usize, plan: Plan, builds: Vec<String>) -> Self {
        let load_after = machine.load_before;
        let (rounds, slice) = (plan.rounds, plan.slice.as_secs_f64());
        let (cases, two_cpus, verifier) = (Vec::new(), Vec::new(), Vec::new());
        Self { machine, cpu, load_after, rounds, slice, builds, cases, two_cpus, verifier }
    }

    pub(crate) fn goals_met(&self) -> bool {
        self.cases.iter().all(|row| row.met != Some(false))
    }

    /// The results as tables with notes.
    pub(crate) fn text(&self) -> String {
        let mut parts = vec![self.notes().join("\n"), self.case_table().to_string()];
        parts.extend(
            goals::table_of(&self.cases).map(|table| format!("Goals: × the fastest baseline\n{table}")),
        );
        parts.extend(self.comparison_table().map(|table| table.to_string()));
        if !self.two_cpus.is_empty() {
            parts.push(self.two_cpu_table().to_string());
        }
        if !self.verifier.is_empty() {
            parts.push(self.verifier_table().to_string());
        }
        parts.join("\n\n")
    }

    fn notes(&self) -> Vec<String> {
        let Self { machine, cpu, load_after, rounds, slice, builds, .. } = self;
        let mut notes = vec![
            format!("{machine}, {load_after} after"),
            format!("{rounds} rounds of {:.0} ms per program, on CPU {cpu}", slice * 1e3),
        ];
        if let [new, old] = &builds[..] {
            notes.push(format!("programs of {new}, compared with those of {old} in the same rounds"));
        }
        notes
    }

    fn rows(&self, section: Section) -> impl Iterator<Item = &Row> {
        self.cases.iter().filter(move |row| row.section == section)
    }

    fn case_table(&self) -> Table {
        let mut rows = Vec::new();
        for section in Section::ALL {
            let Some(first) = self.rows(section).next() else { continue };
            rows.push(vec![format!("{}; baseline: {}", section.label(), first.baseline_program)]);
            for other in &first.other_baselines {
                let [min, median, max] = spread(&other.net, 1);
                rows.push(vec![format!("  × other: {}", other.program), min, median, max]);
            }
            rows.extend(self.rows(section).map(Row::cells));
        }
        table(HEADER.to_vec(), rows)
    }

    /// A table that compares the builds; `None` if there is only one.
    fn comparison_table(&self) -> Option<Table> {
        let [new, old] = &self.builds[..] else { return None };
        let mut rows = Vec::new();
        for section in Section::ALL {
            let compared = |row: &Row| Some(row.comparison_cells(row.earlier.as_ref()?));
            let of_section: Vec<Vec<String>> = self.rows(section).filter_map(compared).collect();
            if !of_section.is_empty() {
                rows.push(vec![section.label().to_owned()]);
                rows.extend(of_section);
            }
        }
        let head = format!("ns per packet; {new} / {old} in the same round");
        let header = vec![
            head,
            old.clone(),
            new.clone(),
            "/ min".into(),
            "median".into(),
            "max".into(),
            "all rounds".into(),
        ];
        Some(table(header, rows))
    }

    fn two_cpu_table(&self) -> Table {
        let cells = |row: &two_cpus::Row| {
            let mut cells = vec![format!("  {}, {}; {}", row.program, row.packets, row.build)];
            cells.extend([median(&row.alone, 1), median(&row.together, 1)]);
            cells.extend(spread(&row.scaling, 2));
            cells.push(String::new());
            cells
        };
        let head = "two CPUs on one table: ns per packet on each, with overhead";
        let header = vec![head, "alone", "together", "scaling min", "median", "max", ""];
        table(header, self.two_cpus.iter().map(cells).collect())
    }

    fn verifier_table(&self) -> Table {
        let Some(first) = self.verifier.first() else { return table(vec![""], Vec::new()) };
        let mut header = vec!["loading a program".to_owned()];
        for name in &self.builds {
            header.extend([format!("{name}: verified instructions"), "ms".to_owned()]);
        }
        header.push("verified, new / old".to_owned());
        // If only one build has a program, the program's row has no numbers for the other build.
        let mut programs: Vec<&String> = self.verifier.iter().flatten().map(|cost| &cost.program).collect();
        programs.sort();
        programs.dedup();
        let find =
            |costs: &Vec<Cost>, program: &str| costs.iter().find(|cost| cost.program == program).cloned();
        let mut rows: Vec<Vec<String>> = programs
            .iter()
            .map(|program| {
                let found: Vec<Option<Cost>> =
                    self.verifier.iter().map(|costs| find(costs, program)).collect();
                cost_cells(program, &found)
            })
            .collect();
        if !first.is_empty() {
            let total = |costs: &Vec<Cost>| {
                Some(Cost {
                    program: String::new(),
                    verified: costs.iter().map(|cost| cost.verified).sum(),
                    milliseconds: costs.iter().map(|cost| cost.milliseconds).sum(),
                })
            };
            let totals: Vec<Option<Cost>> = self.verifier.iter().map(total).collect();
            rows.push(cost_cells("all", &totals));
        }
        table(header, rows)
    }

    /// Writes a plot into the folder for each section that has results.
    pub(crate) fn write_plots(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating the folder {}", folder.display()))?;
        for section in Section::ALL {
            let bars: Vec<Bar> = self.rows(section).flat_map(Row::bars).collect();
            if bars.is_empty() {
                continue;
            }
            let plot = Plot {
                title: format!("Nanoseconds per packet: {}", section.label()),
                notes: self.notes(),
                unit: "ns of CPU time, net of the overhead of a test run; median, line: min to max"
                    .to_owned(),
                bars,
            };
            plot.write(&folder.join(format!("{}.svg", section.file())))?;
        }
        Ok(())
    }
}

/// The cells of a row with the cost of loading a program, by build.
fn cost_cells(program: &str, builds: &[Option<Cost>]) -> Vec<String> {
    let mut cells = vec![format!("  {program}")];
    for cost in builds {
        match cost {
            Some(cost) => cells.extend([cost.verified.to_string(), format!("{:.0}", cost.milliseconds)]),
            None => cells.extend(["-".to_owned(), "-".to_owned()]),
        }
    }
    cells.push(match builds {
        [Some(new), Some(old)] => format!("{:.2}", f64::from(new.verified) / f64::from(old.verified)),
        _ => String::new(),
    });
    cells
}
