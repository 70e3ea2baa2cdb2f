// Brokers and links, drawn in the size that there is. Places are shares of it; text keeps its size on a phone.
export default {
  template: `
    <figure class="pr-topology" ref="box">
      <svg :viewBox="'0 0 ' + width + ' ' + height" :height="height" role="group" :aria-label="caption">
        <defs>
          <marker v-for="kind in ['sure', 'doubtful']" :key="kind" :id="'pr-arrow-' + kind" viewBox="0 0 10 10"
                  refX="9" refY="5" markerWidth="13" markerHeight="13" markerUnits="userSpaceOnUse" orient="auto">
            <path d="M0 0 L10 5 L0 10 z" :class="'arrow ' + kind" />
          </marker>
        </defs>
        <g v-for="edge in lines" :key="edge.key" class="edge" :class="['tone-' + edge.tone, edge.path]"
           role="img" :aria-label="edge.says">
          <title>{{ edge.says }}</title>
          <line class="touch" :x1="edge.x1" :y1="edge.y1" :x2="edge.x2" :y2="edge.y2" />
          <line class="seen" :x1="edge.x1" :y1="edge.y1" :x2="edge.x2" :y2="edge.y2" :stroke-width="edge.width"
                :marker-end="edge.path ? 'url(#pr-arrow-' + edge.path + ')' : null" />
          <text v-if="edge.label && roomy" :x="(edge.x1 + edge.x2) / 2" :y="(edge.y1 + edge.y2) / 2 - 7"
                aria-hidden="true">{{ edge.label }}</text>
        </g>
        <g v-for="node in dots" :key="node.key" class="node" :class="['tone-' + node.tone, { selected: node.key === selected, marked: node.mark }]"
           role="button" tabindex="0" :aria-label="node.says" :aria-pressed="node.key === selected"
           :transform="'translate(' + node.px + ' ' + node.py + ')'"
           @click="$emit('open', node.key)" @keydown.enter.prevent="$emit('open', node.key)"
           @keydown.space.prevent="$emit('open', node.key)">
          <title>{{ node.says }}</title>
          <circle class="halo" :r="radius + 7" />
          <circle class="body" :r="radius" />
          <text class="inside" dy="0.35em" aria-hidden="true">{{ node.inside }}</text>
          <text class="name" :y="radius + 22" aria-hidden="true">{{ short(node.label) }}</text>
          <text v-if="node.below" class="below" :y="radius + 37" aria-hidden="true">{{ node.below }}</text>
        </g>
      </svg>
      <p v-if="!nodes.length" class="pr-empty">{{ empty }}</p>
    </figure>`,
  props: { nodes: Array, edges: Array, selected: String, caption: String, empty: String },
  data: () => ({ width: 600 }),
  computed: {
    radius() {
      return this.nodes.length > 40 ? 12 : this.width < 500 ? 20 : 26;
    },
    roomy() {
      return this.width >= 500 && this.nodes.length <= 20;
    },
    height() {
      const wanted = this.width < 500 ? this.width * 0.95 : this.width * 0.46;
      return Math.round(Math.min(560, Math.max(300, wanted)));
    },
    dots() {
      const side = Math.max(56, this.radius + 34), top = this.radius + 14, bottom = this.radius + 50;
      return this.nodes.map((node) => ({
        ...node,
        px: Math.round(side + node.x * (this.width - 2 * side)),
        py: Math.round(top + node.y * (this.height - top - bottom)),
      }));
    },
    lines() {
      const at = new Map(this.dots.map((node) => [node.key, node]));
      return this.edges.flatMap((edge) => {
        const from = at.get(edge.from), to = at.get(edge.to);
        if (!from || !to) return [];
        const dx = to.px - from.px, dy = to.py - from.py, long = Math.hypot(dx, dy) || 1;
        const cut = Math.min(this.radius + 3, long / 3);
        return [{
          ...edge,
          x1: from.px + (dx / long) * cut,
          y1: from.py + (dy / long) * cut,
          x2: to.px - (dx / long) * cut,
          y2: to.py - (dy / long) * cut,
        }];
      });
    },
  },
  methods: {
    short(name) {
      return name.length > 18 ? name.slice(0, 17) + "…" : name;
    },
  },
  mounted() {
    this.observer = new ResizeObserver(() => (this.width = this.$refs.box.clientWidth || this.width));
    this.observer.observe(this.$refs.box);
  },
  unmounted() {
    this.observer.disconnect();
  },
};
