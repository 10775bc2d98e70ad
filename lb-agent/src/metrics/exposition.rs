//! Converts the OpenMetrics text that the library writes to the text format of Prometheus (0.0.4), which kube-proxy
//! serves.

/// Converts metrics from the OpenMetrics text format to that of Prometheus; the two differ in a few lines of metadata.
pub(super) fn prometheus(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut help = None;
    for line in open_metrics.lines() {
        match line.split_once(' ').and_then(|(hash, rest)| (hash == "#").then_some(rest)) {
            None => push(&mut text, &[line]),
            Some(meta) => match meta.split_once(' ') {
                Some(("HELP", rest)) => help = rest.split_once(' '),
                Some(("TYPE", rest)) => {
                    let Some((name, kind)) = rest.split_once(' ') else { continue };
                    // In OpenMetrics the metadata of a counter lack the suffix that its samples have.
                    let suffix = if kind == "counter" { "_total" } else { "" };
                    if let Some((_, help)) = help.take() {
                        push(&mut text, &["# HELP ", name, suffix, " ", help]);
                    }
                    push(&mut text, &["# TYPE ", name, suffix, " ", kind]);
                }
                // Drops the lines that Prometheus' format does not have: units and the end marker.
                _ => {}
            },
        }
    }
    text
}

fn push(text: &mut String, parts: &[&str]) {
    text.extend(parts.iter().copied());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_headers_get_the_suffix_total() {
        let open_metrics = "\
# HELP a_seconds What it is.
# TYPE a_seconds gauge
# UNIT a_seconds seconds
a_seconds{x=\"# HELP y z\"} 1.0
# HELP b Two words.
# TYPE b counter
b_total 2
# EOF
";
        let expected = "\
# HELP a_seconds What it is.
# TYPE a_seconds gauge
a_seconds{x=\"# HELP y z\"} 1.0
# HELP b_total Two words.
# TYPE b_total counter
b_total 2
";
        assert_eq!(prometheus(open_metrics), expected);
    }
}
