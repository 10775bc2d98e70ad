//! Reads the statistics that the program dnsperf prints.

use anyhow::{Context as _, Result};

/// The statistics that dnsperf prints at its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Number of answered queries.
    pub completed: u64,
    /// Number of queries without an answer within dnsperf's timeout.
    pub lost: u64,
    /// The response codes, each with the number of its answers, for example `NOERROR 50 (100.00%)`.
    pub codes: String,
    /// Answered queries per second.
    pub rate: f64,
    /// Mean size of an answer in bytes.
    pub answer_size: f64,
}

impl Statistics {
    /// Reads the output of dnsperf.
    ///
    /// # Errors
    /// A line is missing, or its value is no number.
    pub fn read(text: &str) -> Result<Self> {
        let (_, size) = field(text, "Average packet size")?.rsplit_once(' ').context("no size of answers")?;
        Ok(Self {
            completed: number(text, "Queries completed")?,
            lost: number(text, "Queries lost")?,
            codes: field(text, "Response codes")?.to_owned(),
            rate: number(text, "Queries per second")?,
            answer_size: size.parse().with_context(|| format!("the size of answers is {size:?}"))?,
        })
    }
}

/// The value after `name` and a colon.
fn field<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.trim().split_once(':'));
    let found = fields.find(|(field, _)| *field == name).map(|(_, value)| value.trim());
    found.with_context(|| format!("\"{name}\" is missing"))
}

/// The number at the beginning of a field's value.
fn number<T: std::str::FromStr>(text: &str, name: &str) -> Result<T> {
    let first = field(text, name)?.split(' ').next().unwrap_or_default();
    first.parse().ok().with_context(|| format!("{name} is {first:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\
Statistics:

  Queries sent:         100
  Queries completed:    98 (98.00%)
  Queries lost:         2 (2.00%)

  Response codes:       NOERROR 98 (100.00%)
  Average packet size:  request 45, response 61
  Run time (s):         0.100000
  Queries per second:   980.000000
";

    #[test]
    fn statistics_are_read() {
        let expected = Statistics {
            completed: 98,
            lost: 2,
            codes: "NOERROR 98 (100.00%)".to_owned(),
            rate: 980.0,
            answer_size: 61.0,
        };
        assert_eq!(Statistics::read(PRINTED).unwrap(), expected);
        let error = Statistics::read(&PRINTED.replace("lost", "late")).unwrap_err();
        assert_eq!(error.to_string(), "\"Queries lost\" is missing");
    }
}
