//! The tutorial of docs/standalone.md: types its commands, and compares what they print with the page.

use anyhow::{Context as _, ensure};

use super::done;
use super::network::OtherHost;
use super::shell::Shell;

const PAGE: &str = include_str!("../../../../docs/standalone.md");
/// The heading of the tutorial, which ends before the next heading of this level.
const HEADING: &str = "\n## A tutorial\n";
/// Words after the fence of a block of commands: for the guest, and for the other host.
const OF_GUEST: &str = "sh";
const OF_OTHER_HOST: &str = "sh other-host";
/// The word after the fence of a block that shows what the commands before it print.
const PRINTED: &str = "text";

/// Commands, and what they print.
#[derive(Debug, PartialEq, Eq)]
struct Step<'a> {
    is_on_other_host: bool,
    commands: &'a str,
    printed: Option<&'a str>,
}

/// Types the commands of each step; fails if a command does, or if the page shows another output.
pub(super) fn play(guest: &mut Shell, other_host: &OtherHost) -> anyhow::Result<()> {
    let section = section(PAGE).context("docs/standalone.md has no tutorial")?;
    let steps = steps(section)?;
    // The page's reader has the package in the working directory.
    guest.run("cd /root")?;
    for step in &steps {
        let commands = format!("set -e\n{}", step.commands);
        let output = if step.is_on_other_host {
            other_host.run(&["sh", "-c", &commands])?
        } else {
            guest.output(&format!("(\n{commands})"))?
        };
        if let Some(printed) = step.printed {
            ensure!(
                matches(printed, &output),
                "docs/standalone.md: the commands\n{}\nprint\n{output}\n\nThe page shows\n{printed}",
                step.commands
            );
        }
    }
    done(&format!("docs/standalone.md: all {} steps of the tutorial print what the page shows", steps.len()));
    Ok(())
}

/// The tutorial in the page.
fn section(page: &str) -> Option<&str> {
    let (_, from_heading) = page.split_once(HEADING)?;
    from_heading.split("\n## ").next()
}

/// The steps of the tutorial. Fails if it has none, a block without end, or output before the first commands.
fn steps(section: &str) -> anyhow::Result<Vec<Step<'_>>> {
    let mut steps = Vec::<Step<'_>>::new();
    let mut rest = section;
    while let Some((_, block)) = rest.split_once("\n```") {
        let (word, block) = block.split_once('\n').context("a block without lines")?;
        let (content, after) = block.split_once("```\n").context("a block without end")?;
        match word {
            OF_GUEST | OF_OTHER_HOST => {
                steps.push(Step {
                    is_on_other_host: word == OF_OTHER_HOST,
                    commands: content,
                    printed: None,
                });
            }
            PRINTED => steps.last_mut().context("output before the first commands")?.printed = Some(content),
            _ => {}
        }
        rest = after;
    }
    ensure!(!steps.is_empty(), "the tutorial of docs/standalone.md has no commands");
    Ok(steps)
}

/// Whether the page shows this output: `…` stands for any text, and white space within lines does not count.
fn matches(shown: &str, output: &str) -> bool {
    let (shown, output) = (words(shown), words(output));
    let mut parts = shown.split('…').map(|part| part.trim_matches(' '));
    let Some(mut rest) = parts.next().and_then(|first| output.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

/// The text with one space between words, and without white space at the ends of lines.
fn words(text: &str) -> String {
    let line = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.trim().lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_both_hosts_have_their_output() {
        let text =
            "Text.\n\n```sh\nip link\n```\n\nMore:\n\n```text\nlo\n```\n\n```sh other-host\ndig\n```\n";
        let expected = [
            Step { is_on_other_host: false, commands: "ip link\n", printed: Some("lo\n") },
            Step { is_on_other_host: true, commands: "dig\n", printed: None },
        ];
        assert_eq!(steps(text).unwrap(), expected);
        assert!(steps("\n```text\nlo\n```\n").is_err());
        assert!(steps("\n```sh\nip link\n").is_err());
        assert!(steps("").is_err());
    }

    #[test]
    fn tutorial_of_the_page_has_steps_on_both_hosts() {
        let steps = steps(section(PAGE).unwrap()).unwrap();
        for is_on_other_host in [false, true] {
            assert!(steps.iter().any(|step| step.is_on_other_host == is_on_other_host));
        }
        assert!(steps.iter().any(|step| step.printed.is_some()));
    }

    #[test]
    fn ellipsis_stands_for_any_text() {
        for (shown, output) in [
            ("one\n", "one"),
            ("… one\n… two\n", "     11 one\n      9 two"),
            ("Problems   none\n…\n", "Problems  none\nPrograms  13"),
            ("…\n10.1.0.100 lan …\n", "ADDRESS     POOL\n10.1.0.100  lan   web"),
            ("…\n0\n", "Removing lb-agent\n0"),
        ] {
            assert!(matches(shown, output), "{shown:?} {output:?}");
        }
        for (shown, output) in [
            ("one\n", "two"),
            ("one\n", "one\ntwo"),
            ("… one\n… two\n", "20 one"),
            ("Problems none\n…\n", "Problems  2"),
            ("…\n0\n", "Removing lb-agent\n1"),
        ] {
            assert!(!matches(shown, output), "{shown:?} {output:?}");
        }
    }
}
