//! The documentation, inside the binary: Markdown files, as HTML.

use std::{collections::BTreeSet, iter};

use axum::{
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Response},
};
use pulldown_cmark::{CowStr, Event, Options, Parser, Tag, TagEnd, html::push_html};

use crate::assets;

/// Lists files of the folder `docs` by their names without `.md`.
macro_rules! pages {
    ($($name:literal,)*) => {
        const PAGES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../docs/", $name, ".md"))),)*];
    };
}

pages! {
    "README",
    "annotations",
    "announce",
    "datapath",
    "debugging",
    "decisions",
    "dns",
    "dsr",
    "first-hour",
    "flow-log",
    "health-checks",
    "invariants",
    "kernels",
    "kube-proxy",
    "kubectl",
    "kubernetes",
    "limits",
    "loadbalancer",
    "maps",
    "metallb",
    "metrics",
    "package",
    "performance",
    "proxy-protocol",
    "reliability",
    "schedulers",
    "security",
    "settings",
    "standalone",
    "upgrades",
    "web",
}

/// The page that lists all others.
const FIRST: &str = "README";
/// The frame of a page.
const FRAME: &str = include_str!("../assets/docs.html");

/// Answers a request for a page of the documentation; without a name, for the page that lists all others.
pub(crate) fn answer(name: Option<&str>, headers: &HeaderMap) -> Response {
    match document(name.unwrap_or(FIRST)) {
        Some(page) => assets::unless_known("text/html; charset=utf-8", page, headers),
        None => {
            (StatusCode::NOT_FOUND, "the documentation has no such page; /docs lists all").into_response()
        }
    }
}

/// The HTML document of a page.
fn document(name: &str) -> Option<String> {
    let body = documentation(name)?;
    Some(FRAME.replace("<!-- name -->", name).replace("<!-- body -->", &body))
}

/// A file of the folder `docs` as HTML, by its name without `.md`; `None` if there is no such file.
///
/// Headings have the anchors that GitHub gives them. Rows of tables also have anchors, made of their first words: the
/// page `datapath` has `session-affinity`. Links to other files than these pages, and pictures, become text.
pub fn documentation(name: &str) -> Option<String> {
    let (_, text) = PAGES.iter().find(|(known, _)| *known == name)?;
    let mut in_dead_link = false;
    let events = Parser::new_ext(text, Options::ENABLE_TABLES);
    let mut events: Vec<Event<'_>> = events.flat_map(|event| shown(event, &mut in_dead_link)).collect();
    let mut anchors = add_heading_anchors(&mut events);
    let mut html = String::with_capacity(2 * text.len());
    push_html(&mut html, with_row_anchors(&events, &mut anchors).into_iter());
    Some(html)
}

/// The events that a page shows in place of `event`. `in_dead_link`: whether `event` lies within a link that has become
/// text.
#[expect(clippy::wildcard_enum_match_arm, reason = "all other events stay as they are")]
fn shown<'a>(event: Event<'a>, in_dead_link: &mut bool) -> Vec<Event<'a>> {
    let html = |text: &'static str| Event::Html(text.into());
    match event {
        Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
            let target = target(&dest_url);
            *in_dead_link = target.is_none();
            let link = |to: String| Event::Start(Tag::Link { link_type, dest_url: to.into(), title, id });
            target.map(link).into_iter().collect()
        }
        Event::End(TagEnd::Link) if *in_dead_link => Vec::new(),
        Event::Start(Tag::Image { .. }) => vec![Event::InlineHtml("<span class=\"muted\">Picture: ".into())],
        Event::End(TagEnd::Image) => vec![Event::InlineHtml("</span>".into())],
        // A wide block scrolls without the rest of the page, also with the keyboard.
        Event::Start(Tag::CodeBlock(_)) => vec![html("<pre tabindex=\"0\"><code>")],
        Event::End(TagEnd::CodeBlock) => vec![html("</code></pre>\n")],
        Event::Start(Tag::Table(_)) => {
            vec![html("<div class=\"table\" tabindex=\"0\" role=\"region\" aria-label=\"Table\">"), event]
        }
        Event::End(TagEnd::Table) => vec![event, html("</div>\n")],
        // Comments are for authors, not for readers.
        Event::Html(text) | Event::InlineHtml(text) if text.starts_with("<!--") => Vec::new(),
        Event::Html(text) | Event::InlineHtml(text) => vec![Event::Text(text)],
        _ => vec![event],
    }
}

/// The address to which a link of a page leads on this server. Links within the page and links to other servers stay
/// as they are. `None` if this server does not have the file.
fn target(link: &str) -> Option<String> {
    if link.starts_with('#') || link.starts_with("https://") || link.starts_with("http://") {
        return Some(link.to_owned());
    }
    let (file, anchor) = link.split_at(link.find('#').unwrap_or(link.len()));
    let name = file.strip_suffix(".md")?;
    let (name, _) = PAGES.iter().find(|(known, _)| *known == name)?;
    Some(format!("/docs/{name}{anchor}"))
}

/// Gives each heading the anchor that GitHub gives it; returns all anchors.
fn add_heading_anchors(events: &mut [Event<'_>]) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for at in 0..events.len() {
        let Event::Start(Tag::Heading { .. }) = &events[at] else { continue };
        let name = slug(&words(&events[at..], |event| matches!(event, Event::End(TagEnd::Heading(_)))));
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let free = iter::once(name.clone()).chain(numbered).find(|name| !anchors.contains(name));
        if let Event::Start(Tag::Heading { id, .. }) = &mut events[at] {
            *id = free.clone().map(CowStr::from);
        }
        anchors.extend(free);
    }
    anchors
}

/// Gives each row of a table an anchor: the words before the first `;`, `:`, `(` or `,` in its first cell with letters.
/// A row whose anchor is `taken` gets none.
#[expect(clippy::wildcard_enum_match_arm, reason = "all other events stay as they are")]
fn with_row_anchors<'a>(events: &[Event<'a>], taken: &mut BTreeSet<String>) -> Vec<Event<'a>> {
    let mut marked = Vec::with_capacity(events.len());
    let mut is_named = true;
    for (at, event) in events.iter().enumerate() {
        marked.push(event.clone());
        match event {
            Event::Start(Tag::TableRow) => is_named = false,
            Event::Start(Tag::TableCell) if !is_named => {
                let words = words(&events[at..], |event| matches!(event, Event::End(TagEnd::TableCell)));
                let name = slug(words.split([';', ':', '(', ',']).next().unwrap_or_default().trim());
                is_named = name.contains(char::is_alphabetic);
                if is_named && taken.insert(name.clone()) {
                    marked.push(Event::InlineHtml(format!("<span id=\"{name}\"></span>").into()));
                }
            }
            _ => {}
        }
    }
    marked
}

/// The text of the events before the first one for which `is_end` is true.
#[expect(clippy::wildcard_enum_match_arm, reason = "all other events have no text")]
fn words(events: &[Event<'_>], is_end: impl Fn(&Event<'_>) -> bool) -> String {
    let text = |event: &Event<'_>| match event {
        Event::Text(text) | Event::Code(text) => text.to_string(),
        Event::SoftBreak => " ".to_owned(),
        _ => String::new(),
    };
    events.iter().take_while(|event| !is_end(event)).map(text).collect()
}

/// The anchor that GitHub makes of a heading with these words.
fn slug(words: &str) -> String {
    let kept = words.chars().filter(|c| c.is_alphanumeric() || ['-', '_', ' '].contains(c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// The values of an attribute in HTML.
    fn values<'a>(html: &'a str, attribute: &str) -> Vec<&'a str> {
        let before = format!(" {attribute}=\"");
        html.split(&before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    #[test]
    fn every_page_of_the_folder_is_served_and_small() {
        let style = include_str!("../assets/style.css").len();
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "md") {
                continue;
            }
            let name = path.file_stem().unwrap().to_str().unwrap();
            let page = document(name).unwrap_or_else(|| panic!("{name} is not listed"));
            assert!(page.len() + style < 200_000, "{name}: {} bytes", page.len());
            assert!(page.contains(&format!("<title>{name} · lb-agent</title>")), "{name}");
            assert!(page.contains("<h1 id=\""), "{name}");
        }
        assert_eq!(documentation("../README"), None);
    }

    #[test]
    fn links_lead_to_anchors_that_exist() {
        let mut checked = 0;
        for (name, _) in PAGES {
            let page = documentation(name).unwrap();
            for link in values(&page, "href") {
                if link.starts_with("https://") || link.starts_with("http://") {
                    continue;
                }
                let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
                let other = if path.is_empty() { name } else { path.strip_prefix("/docs/").unwrap() };
                let other = documentation(other).unwrap_or_else(|| panic!("{name} links to {link}"));
                let exists = anchor.is_empty() || values(&other, "id").contains(&anchor);
                assert!(exists, "{name} links to {link}");
                checked += 1;
            }
        }
        assert!(checked > 100, "{checked}");
    }

    #[test]
    fn anchors_of_a_page_are_unique() {
        for (name, _) in PAGES {
            let page = documentation(name).unwrap();
            let (all, unique) =
                (values(&page, "id"), values(&page, "id").into_iter().collect::<BTreeSet<_>>());
            assert_eq!(all.len(), unique.len(), "{name}");
        }
    }

    #[test]
    fn pages_load_nothing_and_have_no_inline_code() {
        for (name, _) in PAGES {
            let page = document(name).unwrap();
            for foreign in [
                "<img src=\"http",
                "<img src=\"img",
                "<script",
                "<style",
                " style=",
                " onclick=",
                "javascript:",
            ] {
                assert!(!page.contains(foreign), "{name} has {foreign}");
            }
            assert_eq!(page.matches("<!--").count(), 0, "{name} shows a comment");
        }
    }

    #[test]
    fn rows_headings_pictures_and_code_are_rendered() {
        let page = documentation("datapath").unwrap();
        for part in [
            "<h2 id=\"xdp-routed-flows\">XDP: routed flows</h2>",
            "<span id=\"session-affinity\"></span>session affinity",
            "<span id=\"hairpin\"></span>hairpin: a pod reaches itself",
            "<a href=\"/docs/maps\">maps.md</a>",
            // No link, because the server does not have this file.
            "\nARCHITECTURE.md walks",
            "<pre tabindex=\"0\"><code> pod ──► veth",
        ] {
            assert!(page.contains(part), "{part}");
        }
        assert!(documentation("web").unwrap().contains("Picture: Overview: problems"));
        assert!(documentation("metrics").unwrap().contains("<span id=\"no_service\"></span>"));
    }
}
